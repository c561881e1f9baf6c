# Sluice's own licence, and those of the libraries that a bundle brings along, as texts in a folder of it.

# sluice_install_licences(TARGET DESTINATION COMPONENT PACKAGE...): of TARGET's shared libraries, and of these packages,
# whose code is in it. Where a system knows no packages, or one of another name, a warning says what is missing.
function(sluice_install_licences target destination component)
  include(SluiceSystemLibraries)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/NOTICE DESTINATION ${destination}
    COMPONENT ${component})
  install(CODE "
    set(binary [[$<TARGET_FILE:${target}>]])
    set(system_libraries [[${system_libraries}]])
    set(packages [[${ARGN}]])
    set(with_cuda ${SLUICE_WITH_CUDA})
    set(cuda_folders [[${CUDAToolkit_LIBRARY_ROOT};${CUDAToolkit_TARGET_DIR}]])
    set(destination \"\${CMAKE_INSTALL_PREFIX}/${destination}\")
    include([[${PROJECT_SOURCE_DIR}/cmake/install_licences.cmake]])" COMPONENT ${component})
endfunction()
