# cmake -DPREFIX=<folder> -DWORK=<scratch folder> -P refused.cmake
#
# A component that there is not is refused by name, with those that there are.
cmake_minimum_required(VERSION 3.22)

file(REMOVE_RECURSE ${WORK})
file(WRITE ${WORK}/CMakeLists.txt "cmake_minimum_required(VERSION 3.22)
project(refused LANGUAGES NONE)
find_package(sluice REQUIRED COMPONENTS cuda)
")
execute_process(COMMAND ${CMAKE_COMMAND} -G Ninja -S ${WORK} -B ${WORK}/build -DCMAKE_PREFIX_PATH=${PREFIX}
  RESULT_VARIABLE result OUTPUT_VARIABLE said ERROR_VARIABLE said)
string(REGEX REPLACE "[ \n]+" " " said "${said}")
if(result EQUAL 0 OR NOT said MATCHES "no component cuda.*library .sluice::sluice.*runtime .sluice::runtime")
  message(FATAL_ERROR "configuring ends with ${result}:\n${said}")
endif()
