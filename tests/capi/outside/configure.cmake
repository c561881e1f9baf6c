# cmake -DPROJECT=<folder> -DWORK=<scratch folder> -DARGUMENTS=<for cmake, a|b> -P configure.cmake
#
# Configures a project that asks for no build type.
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)
unpack(ARGUMENTS)

file(REMOVE_RECURSE ${WORK})
run(configured ${CMAKE_COMMAND} -G Ninja -S ${PROJECT} -B ${WORK} ${ARGUMENTS})
