# cmake -DCC=<compiler> -DPKG_CONFIG=<pkg-config> -DPREFIX=<folder> -DLIBDIR=lib -DEXAMPLES=<folder> -DWORK=<folder>
#   -P pkg_config.cmake
#
# Builds with what pkg-config says of an installed Sluice.
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

set(ENV{PKG_CONFIG_PATH} ${PREFIX}/${LIBDIR}/pkgconfig)
run(version ${PKG_CONFIG} --modversion sluice)
run(flags ${PKG_CONFIG} --cflags --libs sluice)
string(STRIP "${flags}" flags)
separate_arguments(flags UNIX_COMMAND "${flags}")
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
run(built ${CC} -std=c99 ${EXAMPLES}/forwards.c -o ${WORK}/forwards ${flags} -Wl,-rpath,${PREFIX}/${LIBDIR})
require_forwards(${WORK}/forwards)
