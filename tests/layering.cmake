# cmake -DROOT=<repository> -P layering.cmake
#
# Holds the dependencies to the star of the design:
#   include/ <- {scheduler/, cpu/, gpu/} <- runtime/ <- {capi/, tools/, tests/}
# and python/ to sluice.h. include/sluice/step/ is not installed: public headers, the C interface, the Llama host and
# the examples do without. In runtime/:
#   {kv/, park/, background/} <- far/ <- engine/
# public headers to the exception that they speak of, and the library rooms to silence: only tools/ may print or end the
# process.
# Prints each violation as file:line, and fails if there is one.
cmake_minimum_required(VERSION 3.22)
if(NOT IS_DIRECTORY "${ROOT}/include")
  message(FATAL_ERROR "ROOT is \"${ROOT}\", which has no include/; pass -DROOT=<repository>")
endif()

set(vocabulary "sluice/|sluice\\.h$")
set(public "sluice/[a-z_0-9]+\\.hpp$|sluice\\.h$")
set(rooms include scheduler cpu gpu runtime capi tools tests python sluice)
list(JOIN rooms "|" any_room)
set(loud_functions "v?f?printf|f?puts|f?putchar|perror|abort|exit|_exit|_Exit|quick_exit|terminate")
set(violations 0)

function(violation file line text)
  math(EXPR violations "${violations} + 1")
  set(violations ${violations} PARENT_SCOPE)
  file(RELATIVE_PATH name ${ROOT} ${file})
  message("${name}:${line}: ${text}")
endfunction()

# The file's lines as a list. Brackets, semicolons and backslashes would upset CMake's lists; none of them
# matters to the rules.
function(read_lines file out)
  file(READ ${file} text)
  string(REGEX REPLACE "[][;\\]" " " text "${text}")
  string(REPLACE "\n" ";" text "${text}")
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

function(files_of room out)
  file(GLOB_RECURSE files LIST_DIRECTORIES false
    ${ROOT}/${room}/*.c ${ROOT}/${room}/*.h ${ROOT}/${room}/*.hpp ${ROOT}/${room}/*.cpp ${ROOT}/${room}/*.cuh
    ${ROOT}/${room}/*.cu)
  set(${out} "${files}" PARENT_SCOPE)
endfunction()

# check_file(FILE OWN regex SYSTEM regex BANNED_SYSTEM regex [SILENT])
#   OWN            headers of ours that may be included, by path from the root or include/
#   SYSTEM         if given, the only <headers> that may be included
#   BANNED_SYSTEM  if given, <headers> that may not
#   SILENT         no printing, no ending of the process
function(check_file file)
  cmake_parse_arguments(rule "SILENT" "OWN;SYSTEM;BANNED_SYSTEM" "" ${ARGN})
  read_lines(${file} lines)
  set(number 0)
  foreach(line IN LISTS lines)
    math(EXPR number "${number} + 1")
    if(line MATCHES "^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"]+)")
      set(bracket "${CMAKE_MATCH_1}")
      set(header "${CMAKE_MATCH_2}")
      if(bracket STREQUAL "\"" OR header MATCHES "^(${any_room})/")
        if(NOT header MATCHES "^(${rule_OWN})")
          violation(${file} ${number} "includes \"${header}\" against the layering")
        endif()
      elseif(rule_SYSTEM AND NOT header MATCHES "^(${rule_SYSTEM})$")
        violation(${file} ${number} "includes <${header}>; only the standard library is allowed here")
      elseif(rule_BANNED_SYSTEM AND header MATCHES "^(${rule_BANNED_SYSTEM})")
        violation(${file} ${number} "includes <${header}>; CUDA belongs to gpu/")
      endif()
    elseif(rule_SILENT AND line MATCHES "cout|cerr|clog|printf|puts|putchar|perror|abort|exit|terminate")
      # Comments and messages may say these words.
      string(REGEX REPLACE "^[ \t]*/?\\*.*|//.*|\"[^\"]*\"" "" code "${line}")
      if(code MATCHES "(^|[^A-Za-z0-9_])(std::(cout|cerr|clog)([^A-Za-z0-9_]|$))" OR
         code MATCHES "(^|[^A-Za-z0-9_.>])(${loud_functions})[ \t]*\\(")
        violation(${file} ${number} "uses ${CMAKE_MATCH_2}; library code neither prints nor ends the process")
      endif()
    endif()
  endforeach()
  set(violations ${violations} PARENT_SCOPE)
endfunction()

set(standard_library "[a-z0-9_]+|std[a-z]+\\.h")
set(cuda_headers "cuda|cub/|thrust/|cooperative_groups|nccl|nvtx|cublas")

macro(check_room room)
  files_of(${room} room_files)
  foreach(room_file IN LISTS room_files)
    check_file(${room_file} ${ARGN})
  endforeach()
endmacro()

files_of(include headers)
foreach(header_file IN LISTS headers)
  if(header_file MATCHES "/include/sluice/step/")
    check_file(${header_file} OWN "${vocabulary}" SYSTEM "${standard_library}" SILENT)
  else()
    check_file(${header_file} OWN "${public}" SYSTEM "${standard_library}" SILENT)
  endif()
endforeach()
# Who includes a header of ours can catch what its functions throw.
files_of(include public_headers)
foreach(public_header IN LISTS public_headers)
  read_lines(${public_header} lines)
  list(FILTER lines INCLUDE REGEX "Error{|include \"sluice/error.hpp\"")
  if(lines MATCHES "Error{" AND NOT lines MATCHES "include \"sluice/error.hpp\"")
    violation(${public_header} 1 "uses Error, and does not include sluice/error.hpp")
  endif()
endforeach()
# Linear algebra of the host is Eigen's.
check_room(scheduler OWN "${vocabulary}|scheduler/" SYSTEM "${standard_library}|Eigen/[A-Za-z]+" SILENT)
check_room(cpu OWN "${vocabulary}|cpu/" BANNED_SYSTEM "${cuda_headers}" SILENT)
check_room(gpu OWN "${vocabulary}|gpu/" SILENT)
check_room(runtime OWN "${vocabulary}|(scheduler|cpu|gpu|runtime)/" BANNED_SYSTEM "${cuda_headers}" SILENT)

# What its rooms may know of each other.
foreach(inner kv park background)
  check_room(runtime/${inner} OWN "${vocabulary}|(scheduler|cpu)/|runtime/${inner}/")
endforeach()
check_room(runtime/far OWN "${vocabulary}|(scheduler|cpu)/|runtime/(background|far)/")

check_room(capi OWN "${public}|(runtime|capi)/" BANNED_SYSTEM "${cuda_headers}" SILENT)

# The Llama host and the examples embed the library as a stranger would: through public headers alone.
files_of(tools tool_files)
foreach(tool_file IN LISTS tool_files)
  if(tool_file MATCHES "/tools/llama/")
    check_file(${tool_file} OWN "${public}|tools/llama/|cpu/machine/crc32c")
  elseif(tool_file MATCHES "/tools/examples/")
    check_file(${tool_file} OWN "${public}")
  else()
    check_file(${tool_file} OWN "${vocabulary}|(scheduler|cpu|gpu|runtime|capi|tools)/")
  endif()
endforeach()

# Python stands on the C interface alone, whatever of it is compiled one day.
check_room(python OWN "sluice\\.h$" BANNED_SYSTEM "${cuda_headers}")

if(violations GREATER 0)
  message(FATAL_ERROR "${violations} layering violations in ${ROOT}")
endif()
