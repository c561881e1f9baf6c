# What a wheel has of this build: libsluice.so beside the package's modules, with the libraries that it needs. In a wheel
# links would be copies, so each file comes once, by the name that is looked for.
include(SluiceSystemLibraries)
include(SluiceLicences)
set_target_properties(sluice_c PROPERTIES BUILD_WITH_INSTALL_RPATH ON)
install(FILES $<TARGET_FILE:sluice_c> DESTINATION sluice RENAME libsluice.so COMPONENT python)
list(TRANSFORM system_libraries REPLACE "(.+)" "[[\\1]]" OUTPUT_VARIABLE quoted_libraries)
list(JOIN quoted_libraries " " quoted_libraries)
install(CODE "
  file(GET_RUNTIME_DEPENDENCIES LIBRARIES [[$<TARGET_FILE:sluice_c>]] RESOLVED_DEPENDENCIES_VAR libraries
    PRE_EXCLUDE_REGEXES ${quoted_libraries})
  foreach(library IN LISTS libraries)
    get_filename_component(name \"\${library}\" NAME)
    get_filename_component(file \"\${library}\" REALPATH)
    file(COPY_FILE \"\${file}\" \"\${CMAKE_INSTALL_PREFIX}/sluice/\${name}\")
  endforeach()" COMPONENT python)
sluice_install_licences(sluice_c sluice/licences python libeigen3-dev)
