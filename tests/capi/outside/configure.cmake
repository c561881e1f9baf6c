# cmake -DPROJECT=<folder> -DWORK=<scratch folder> -DARGUMENTS=<list for cmake> -P configure.cmake
#
# Configures a project that asks for no build type.
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${WORK})
run(configured ${CMAKE_COMMAND} -G Ninja -S ${PROJECT} -B ${WORK} ${ARGUMENTS})
