# cmake -DBUILD=<folder> -DPREFIX=<folder> -DLIBDIR=lib -DMOVED=<folder> -DTOOLS=ON -P install.cmake
#
# Installs, moves what was installed, and sees that the command runs there, with its libraries beside it.
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${PREFIX} ${MOVED})
run(installed ${CMAKE_COMMAND} --install ${BUILD} --prefix ${MOVED})
file(RENAME ${MOVED} ${PREFIX})
foreach(file share/doc/sluice/LICENSE include/sluice.h include/sluice/engine.hpp ${LIBDIR}/libsluice.so ${LIBDIR}/libsluice.so.1)
  if(NOT EXISTS ${PREFIX}/${file})
    message(FATAL_ERROR "${file} was not installed")
  endif()
endforeach()
if(EXISTS ${PREFIX}/include/sluice/step)
  message(FATAL_ERROR "headers of the inside were installed: include/sluice/step")
endif()
if(TOOLS)
  # Of the libraries that come along, on systems whose packages have them.
  file(GLOB licences ${PREFIX}/share/doc/sluice/licences/*tbb*.txt)
  if(EXISTS /var/lib/dpkg/status AND NOT licences)
    message(FATAL_ERROR "libtbb was installed without its licence")
  endif()
  run(said ${PREFIX}/bin/sluice policies)
  if(NOT said MATCHES "twilight")
    message(FATAL_ERROR "the installed command says: ${said}")
  endif()
endif()
