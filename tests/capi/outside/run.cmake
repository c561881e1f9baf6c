# Runs commands that must succeed.

# Lists come with bars between their elements: ctest's arguments cannot have semicolons.
function(unpack name)
  string(REPLACE "|" ";" list "${${name}}")
  set(${name} "${list}" PARENT_SCOPE)
endfunction()

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
  if(NOT said MATCHES "a has 261 tokens, b 1025, c 1001. 1.3 of 64.0 MiB in use")
    message(FATAL_ERROR "${program} says: ${said}")
  endif()
endfunction()
