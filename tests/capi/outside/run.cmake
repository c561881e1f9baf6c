# Runs commands that must succeed.

function(run out)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(JOIN " " command ${ARGN})
    message(FATAL_ERROR "${command}\nends with ${result}:\n${output}")
  endif()
  set(${out} "${output}" PARENT_SCOPE)
endfunction()

# The example, which says what the engine did.
function(require_forwards program)
  run(said ${program})
  if(NOT said MATCHES "a has 261 tokens, b 1025, c 1001; 1.3 of 64.0 MiB in use")
    message(FATAL_ERROR "${program} says: ${said}")
  endif()
endfunction()
