# cmake -DNM=<nm> -DLIBRARY=<libsluice.so> -DHEADER=<sluice.h> -P symbols.cmake
#
# The library exports what sluice.h declares, under its version, and nothing else.
cmake_minimum_required(VERSION 3.22)
execute_process(COMMAND ${NM} -D --defined-only --with-symbol-versions ${LIBRARY}
  OUTPUT_VARIABLE table RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${NM} cannot read ${LIBRARY}")
endif()

set(exported "")
string(REGEX MATCHALL "[^\n]+" lines "${table}")
foreach(line IN LISTS lines)
  if(line MATCHES " A SLUICE_1(@@SLUICE_1)?$")
    continue()  # The version itself.
  endif()
  if(NOT line MATCHES " T (sluice_[a-z_]+)@@SLUICE_1$")
    message(SEND_ERROR "exported, and no function of sluice.h: ${line}")
    continue()
  endif()
  list(APPEND exported ${CMAKE_MATCH_1})
endforeach()

file(READ ${HEADER} text)
string(REGEX MATCHALL "SLUICE_API [^(;]*[ *]sluice_[a-z_]+\\(" declared "${text}")
list(TRANSFORM declared REPLACE ".*[ *](sluice_[a-z_]+)\\($" "\\1")
list(SORT declared)
list(SORT exported)
list(LENGTH declared count)
if(count LESS 20 OR NOT declared STREQUAL exported)
  message(FATAL_ERROR "sluice.h declares ${declared}\nthe library exports ${exported}")
endif()
