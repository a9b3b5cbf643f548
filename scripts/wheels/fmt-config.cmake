# The package fmt of the wheels: libfmt.a in this folder (scripts/wheels/toolchain.sh). Its properties are those of the
# system's package, so that compilers are called with the same options.
if(NOT TARGET fmt::fmt)
  add_library(fmt::fmt STATIC IMPORTED)
  set_target_properties(fmt::fmt PROPERTIES IMPORTED_LOCATION "${CMAKE_CURRENT_LIST_DIR}/libfmt.a"
                                            INTERFACE_COMPILE_DEFINITIONS FMT_SHARED)
endif()
