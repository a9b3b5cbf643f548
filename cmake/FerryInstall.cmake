# Install rules, the package for `find_package(ferry)`, and ferry.pc for pkg-config.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(ferry_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/ferry")

install(TARGETS ferry EXPORT ferry_targets
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/ferry" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h" PATTERN "*.cuh")
install(FILES "${PROJECT_BINARY_DIR}/include/ferry/version.hpp" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/ferry")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

if(FERRY_TOOLS)
  # A relative path, so that the command finds the library after the tree has been moved.
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

# A program links the dependencies of a static library itself. The paths are relative, so that the tree can be moved.
set(ferry_pkgconfig_libs)
if(ferry_library_type STREQUAL "STATIC_LIBRARY")
  # The linker of C programs adds neither of the last two.
  set(ferry_pkgconfig_libs "-lcrypto -pthread -ldl -lstdc++ -lm")
  if(NOT FERRY_FMT_HEADER_ONLY)
    string(APPEND ferry_pkgconfig_libs " -lfmt")
  endif()
  if(FERRY_WITH_CUDA)
    string(APPEND ferry_pkgconfig_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt")
  endif()
endif()
set(ferry_pkgconfig_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
file(RELATIVE_PATH ferry_prefix_from_pkgconfig "/${ferry_pkgconfig_dir}" "/")
string(REGEX REPLACE "/$" "" ferry_prefix_from_pkgconfig "${ferry_prefix_from_pkgconfig}")
configure_file("${PROJECT_SOURCE_DIR}/cmake/ferry.pc.in" "${PROJECT_BINARY_DIR}/ferry.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/ferry.pc" DESTINATION "${ferry_pkgconfig_dir}")
