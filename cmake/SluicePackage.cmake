# What other projects build against, in two components:
#   library      libsluice.so, sluice.h, package files for CMake (sluice::sluice) and pkg-config
#   development  the C++ headers, static libraries, and their CMake package file (sluice::runtime)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)

if(SLUICE_BUILD_SHARED)
  add_dependencies(sluice_installed sluice_c)
  install(TARGETS sluice_c EXPORT sluice_library
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT library)
  install(EXPORT sluice_library NAMESPACE sluice:: FILE sluiceLibrary.cmake DESTINATION ${package_dir}
    COMPONENT library)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR}
    COMPONENT library)
  install(FILES ${PROJECT_SOURCE_DIR}/include/sluice.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
  # Wherever it is moved to, the prefix is found from where the file lies.
  file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/sluice.pc.in ${PROJECT_BINARY_DIR}/sluice.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/sluice.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
endif()

set(libraries headers scheduler cpu runtime)
if(SLUICE_WITH_CUDA)
  list(APPEND libraries gpu)
endif()
foreach(library IN LISTS libraries)
  set_target_properties(sluice_${library} PROPERTIES EXPORT_NAME ${library})
  add_dependencies(sluice_installed sluice_${library})
  install(TARGETS sluice_${library} EXPORT sluice_runtime
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
endforeach()
install(EXPORT sluice_runtime NAMESPACE sluice:: FILE sluiceRuntime.cmake DESTINATION ${package_dir}
  COMPONENT development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/sluice DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
  FILES_MATCHING PATTERN *.hpp PATTERN step EXCLUDE)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/FindHwloc.cmake DESTINATION ${package_dir} COMPONENT development)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/sluiceConfig.cmake.in
  ${PROJECT_BINARY_DIR}/sluiceConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sluiceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sluiceConfig.cmake ${PROJECT_BINARY_DIR}/sluiceConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT library)
