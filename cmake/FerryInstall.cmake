# Install rules and the package that `find_package(ferry)` finds.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(ferry_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/ferry")

install(TARGETS ferry EXPORT ferry_targets
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/ferry" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(FILES "${PROJECT_BINARY_DIR}/include/ferry/version.hpp" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/ferry")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

if(FERRY_TOOLS)
  # The command finds the library beside it, wherever the tree is moved.
  file(RELATIVE_PATH lib_from_bin "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
  set_target_properties(ferry_command PROPERTIES INSTALL_RPATH "$ORIGIN/${lib_from_bin}")
  install(TARGETS ferry_command RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

get_target_property(ferry_library_type ferry TYPE)
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/ferry-config.cmake.in"
                              "${PROJECT_BINARY_DIR}/ferry-config.cmake" INSTALL_DESTINATION "${ferry_package_dir}")
# Until 1.0 a minor version may change the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/ferry-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(EXPORT ferry_targets NAMESPACE ferry:: FILE ferry-targets.cmake DESTINATION "${ferry_package_dir}")
install(FILES "${PROJECT_BINARY_DIR}/ferry-config.cmake" "${PROJECT_BINARY_DIR}/ferry-config-version.cmake"
        DESTINATION "${ferry_package_dir}")
