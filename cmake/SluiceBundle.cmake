# A directory or archive that runs where nothing is installed but a C++ runtime and, for a GPU, its driver:
#   cmake --install build/release --prefix DIR
#   cpack --config build/release/CPackConfig.cmake      sluice-VERSION-Linux-x86_64.tar.gz
# The command finds its libraries beside itself ($ORIGIN). cuBLASLt, which only models on a GPU need and which is
# larger than everything else, comes from the GPU machine: it is opened by name when such a model is loaded.
# The older kind of run path, which the libraries' own dependencies are looked up in, too (hwloc's libudev).
target_link_options(sluice PRIVATE -Wl,--disable-new-dtags)
set_target_properties(sluice PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
install(TARGETS sluice RUNTIME_DEPENDENCY_SET sluice_libraries RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
add_dependencies(sluice_installed sluice)
include(SluiceSystemLibraries)
install(RUNTIME_DEPENDENCY_SET sluice_libraries
  PRE_EXCLUDE_REGEXES ${system_libraries}
  DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
# The command writes its own manual and completions.
foreach(page IN ITEMS "man ${CMAKE_INSTALL_MANDIR}/man1 sluice.1"
    "bash ${CMAKE_INSTALL_DATADIR}/bash-completion/completions sluice"
    "zsh ${CMAKE_INSTALL_DATADIR}/zsh/site-functions _sluice"
    "fish ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d sluice.fish")
  separate_arguments(page)
  list(GET page 0 form)
  list(GET page 1 folder)
  list(GET page 2 file)
  install(CODE "
    set(folder \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${folder}\")
    file(MAKE_DIRECTORY \${folder})
    message(STATUS \"Installing: \${folder}/${file}\")
    execute_process(COMMAND \"$<TARGET_FILE:sluice>\" manual ${form} OUTPUT_FILE \${folder}/${file} RESULT_VARIABLE failed)
    if(failed)
      message(FATAL_ERROR \"sluice manual ${form} failed: \${failed}\")
    endif()")
endforeach()
include(SluiceLicences)
sluice_install_licences(sluice ${CMAKE_INSTALL_DOCDIR}/licences Unspecified libcli11-dev nlohmann-json3-dev libeigen3-dev)

set(CPACK_GENERATOR TGZ)
set(CPACK_PACKAGE_NAME sluice)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
# What it runs on: the system, the processor, and -cuda where it has the CUDA device.
set(CPACK_PACKAGE_FILE_NAME sluice-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
if(SLUICE_WITH_CUDA)
  string(APPEND CPACK_PACKAGE_FILE_NAME -cuda)
endif()
set(CPACK_STRIP_FILES ON)
# Static libraries are for those who build, on the machine where they build.
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};sluice;Unspecified;/")
if(SLUICE_INSTALL AND SLUICE_BUILD_SHARED)
  list(APPEND CPACK_INSTALL_CMAKE_PROJECTS ${CMAKE_BINARY_DIR} sluice library /)
endif()
set(CPACK_PACKAGE_CHECKSUM SHA256)
include(CPack)
