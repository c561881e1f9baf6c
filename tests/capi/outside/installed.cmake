# cmake -DBUILD=<folder> -P installed.cmake
#
# The target sluice_installed builds all that `cmake --install` copies.
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(STRINGS ${BUILD}/CMakeCache.txt ninja REGEX "^CMAKE_MAKE_PROGRAM:")
string(REGEX REPLACE "^[^=]*=" "" ninja "${ninja}")
run(commands ${ninja} -C ${BUILD} -t commands sluice_installed)

file(GLOB_RECURSE scripts ${BUILD}/cmake_install.cmake)
# What other tests have built there is not ours to install.
list(FILTER scripts EXCLUDE REGEX "/tests/capi/outside/work/")
set(count 0)
foreach(script IN LISTS scripts)
  file(STRINGS ${script} lines REGEX "TYPE (EXECUTABLE|SHARED_LIBRARY|STATIC_LIBRARY)")
  foreach(line IN LISTS lines)
    string(REGEX MATCHALL "\"${BUILD}/[^\"]+\"" files "${line}")
    foreach(file IN LISTS files)
      string(REGEX REPLACE "^\"${BUILD}/|\"$" "" file "${file}")
      string(FIND "${commands}" "${file}" at)
      if(at EQUAL -1)
        message(FATAL_ERROR "${file} is installed, and sluice_installed does not build it")
      endif()
      math(EXPR count "${count} + 1")
    endforeach()
  endforeach()
endforeach()
if(count LESS 5)
  message(FATAL_ERROR "found ${count} files that are installed: this test does not see them")
endif()
