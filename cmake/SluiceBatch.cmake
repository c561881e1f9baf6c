# sluice_batch(TARGET): the target's C++ sources are compiled SLUICE_BATCH at a time, in the order in which they were
# given, as files that include them. Most of what a source takes the compiler is its headers, so this halves the time.
# Sources with options of their own stay alone; those come before the call. Names of anonymous namespaces have to differ
# within a target.
#
# CMake's own unity builds write absolute paths into these files, and another clone would find nothing in ccache.
function(sluice_batch target)
  get_target_property(sources ${target} SOURCES)
  set(kept "")
  set(batch "")
  set(number 0)
  set(in_batch 0)
  foreach(source IN LISTS sources)
    get_filename_component(path ${source} ABSOLUTE)
    get_source_file_property(options ${path} COMPILE_OPTIONS)
    if(SLUICE_BATCH LESS 2 OR options OR NOT source MATCHES "\\.cpp$")
      list(APPEND kept ${source})
      continue()
    endif()
    file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR} ${path})
    string(APPEND batch "#include \"${name}\"\n")
    math(EXPR in_batch "${in_batch} + 1")
    if(in_batch EQUAL SLUICE_BATCH)
      sluice_write_batch()
    endif()
  endforeach()
  if(in_batch)
    sluice_write_batch()
  endif()
  set_target_properties(${target} PROPERTIES SOURCES "${kept}")
endfunction()

# Ends a batch of the function above.
macro(sluice_write_batch)
  set(file ${CMAKE_CURRENT_BINARY_DIR}/${target}_${number}.cpp)
  file(CONFIGURE OUTPUT ${file} CONTENT "${batch}" @ONLY)
  list(APPEND kept ${file})
  set(batch "")
  set(in_batch 0)
  math(EXPR number "${number} + 1")
endmacro()
