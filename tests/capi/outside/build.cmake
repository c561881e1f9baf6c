# cmake -DPROJECT=<folder> -DWORK=<scratch folder> -DARGUMENTS=<for cmake, a|b> -DPROGRAMS=<a|b> -P build.cmake
#
# Configures and builds a project as a stranger would, and runs its programs.
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)
unpack(ARGUMENTS)
unpack(PROGRAMS)

file(REMOVE_RECURSE ${WORK})
run(configured ${CMAKE_COMMAND} -G Ninja -S ${PROJECT} -B ${WORK} ${ARGUMENTS})
run(built ${CMAKE_COMMAND} --build ${WORK})
foreach(program IN LISTS PROGRAMS)
  require_forwards(${WORK}/${program})
endforeach()
