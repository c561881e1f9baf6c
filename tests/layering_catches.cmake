# cmake -DWORK=<scratch folder> -P layering_catches.cmake
#
# A rule that never fires proves nothing: on a tree made for it, layering.cmake must report exactly the lines
# marked BAD, and pass once they are gone.
cmake_minimum_required(VERSION 3.22)
if(NOT WORK)
  message(FATAL_ERROR "pass -DWORK=<scratch folder>")
endif()

set(sources "")
function(source path)
  string(JOIN "\n" text ${ARGN})
  file(WRITE ${WORK}/${path} "${text}\n")
  set(sources ${sources} ${path} PARENT_SCOPE)
endfunction()

function(check out_result out_report)
  execute_process(COMMAND ${CMAKE_COMMAND} -DROOT=${WORK} -P ${CMAKE_CURRENT_LIST_DIR}/layering.cmake
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  set(${out_result} ${result} PARENT_SCOPE)
  set(${out_report} "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
source(include/sluice.h
  "/* exit(1) in a comment */" "#include <stdint.h>" "#include \"sluice/error.hpp\"" "#include \"cpu/a.hpp\"  // BAD")
source(include/sluice/vocabulary.hpp
  "#include <vector>" "#include <cuda_runtime.h>  // BAD" "#include <tbb/parallel_for.h>  // BAD"
  "#include <Eigen/Core>  // BAD" "#include <hwloc.h>  // BAD" "# include \"scheduler/a.hpp\"  // BAD"
  "#include \"vocabulary.hpp\"  // BAD")
source(include/sluice/step/inner.hpp "#include \"sluice/step/other.hpp\"" "#include \"cpu/a.hpp\"  // BAD")
source(include/sluice/reaches.hpp "#include \"sluice/error.hpp\"" "#include \"sluice/step/inner.hpp\"  // BAD")
source(include/sluice/throws.hpp "#pragma once  // BAD" "/// @throws Error{Errc::io}")
source(include/sluice/tells.hpp "#include \"sluice/error.hpp\"" "/// @throws Error{Errc::io}")
source(scheduler/policy/a.cpp
  "#include \"sluice/policy.hpp\"" "#include \"scheduler/a.hpp\"" "#include \"cpu/a.hpp\"  // BAD"
  "#include \"../../gpu/a.hpp\"  // BAD" "#include <tbb/task_arena.h>  // BAD" "#include <Eigen/Core>"
  "#include <unsupported/Eigen/FFT>  // BAD")
source(cpu/a.cpp
  "#include <hwloc.h>" "#include \"cpu/a.hpp\"" "#include \"gpu/a.hpp\"  // BAD" "#include <scheduler/a.hpp>  // BAD"
  "#include <cuda_runtime.h>  // BAD" "// std::cout << 1, printf(2), exit(3)" "const char* text = \"exit(1), abort()\""
  "std::snprintf(text, 1, \"%d\", 1)" "loop.exit()" "on_exit(1)" "return [] { std::abort()  // BAD"
  "std::cerr << 1  // BAD" "std::printf(\"1\")  // BAD" "  if (failed) exit(1)  // BAD" "std::terminate()  // BAD")
source(gpu/a.cu
  "#include <cuda_runtime.h>" "#include \"gpu/a.cuh\"" "#include \"runtime/a.hpp\"  // BAD" "  printf(\"1\")  // BAD")
source(runtime/a.cpp
  "#include \"scheduler/a.hpp\"" "#include \"cpu/a.hpp\"" "#include \"gpu/a.hpp\"" "#include \"runtime/a.hpp\""
  "#include \"tools/cli/a.hpp\"  // BAD" "#include \"tests/support/a.hpp\"  // BAD" "#include <cuda_bf16.h>  // BAD"
  "#include \"capi/a.hpp\"  // BAD" "fputs(text, stderr)  // BAD")
source(runtime/far/a.cpp
  "#include \"cpu/a.hpp\"" "#include \"runtime/far/a.hpp\"" "#include \"runtime/background/a.hpp\""
  "#include \"runtime/engine/a.hpp\"  // BAD" "#include \"runtime/kv/a.hpp\"  // BAD")
foreach(inner background kv park)
  source(runtime/${inner}/a.cpp
    "#include \"runtime/${inner}/a.hpp\"" "#include \"runtime/far/a.hpp\"  // BAD"
    "#include \"runtime/engine/a.hpp\"  // BAD")
endforeach()
source(capi/a.cpp
  "#include \"sluice.h\"" "#include \"sluice/engine.hpp\"" "#include \"runtime/a.hpp\"" "#include \"capi/a.hpp\""
  "#include \"cpu/a.hpp\"  // BAD" "#include \"gpu/a.hpp\"  // BAD" "#include \"tools/cli/a.hpp\"  // BAD"
  "#include \"sluice/step/inner.hpp\"  // BAD" "#include <cuda_runtime.h>  // BAD" "std::abort()  // BAD")
source(python/a.c
  "#include \"sluice.h\"" "#include <Python.h>" "#include \"capi/a.hpp\"  // BAD" "#include \"sluice/engine.hpp\"  // BAD")
source(tools/examples/a.c
  "#include \"sluice.h\"" "#include \"sluice/engine.hpp\"" "#include \"capi/a.hpp\"  // BAD"
  "#include \"sluice/step/inner.hpp\"  // BAD" "#include \"tests/support/a.hpp\"  // BAD")
source(tools/cli/a.cpp
  "#include \"runtime/a.hpp\"" "#include \"tools/llama/a.hpp\"" "#include <cuda_runtime.h>" "std::exit(1)"
  "#include \"tests/support/a.hpp\"  // BAD")
source(tools/llama/a.cpp
  "#include \"sluice/runtime.hpp\"" "#include \"tools/llama/a.hpp\"" "std::printf(\"1\")"
  "#include \"sluice/step/inner.hpp\"  // BAD" "#include \"cpu/threads/workers.hpp\"  // BAD"
  "#include \"tools/cli/a.hpp\"  // BAD")

set(expected "")
foreach(path IN LISTS sources)
  file(STRINGS ${WORK}/${path} lines)
  set(number 0)
  foreach(line IN LISTS lines)
    math(EXPR number "${number} + 1")
    if(line MATCHES "// BAD$")
      list(APPEND expected "${path}:${number}")
    endif()
  endforeach()
endforeach()

check(result report)
string(REGEX MATCHALL "[a-z_/.]+:[0-9]+: (includes|uses)" reported "${report}")
list(TRANSFORM reported REPLACE ": .*" "")
list(SORT expected)
list(SORT reported)
list(LENGTH expected count)
if(NOT reported STREQUAL expected)
  message(FATAL_ERROR "expected ${expected}\nreported ${reported}\n${report}")
endif()
if(result EQUAL 0 OR NOT report MATCHES "${count} layering violations")
  message(FATAL_ERROR "exit code ${result} does not tell of ${count} violations:\n${report}")
endif()

file(WRITE ${WORK}/include/sluice/throws.hpp "#include \"sluice/error.hpp\"\n/// @throws Error{Errc::io}\n")
foreach(path IN LISTS sources)
  file(READ ${WORK}/${path} text)
  string(REGEX REPLACE "[^\n]*// BAD" "" text "${text}")
  file(WRITE ${WORK}/${path} "${text}")
endforeach()
check(result report)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "a clean tree fails:\n${report}")
endif()
