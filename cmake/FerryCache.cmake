# Compilation through ccache where it is installed, unless a launcher is set or FERRY_CCACHE is OFF. A project that
# contains this one chooses for itself.
option(FERRY_CCACHE "Compile through ccache where it is installed" ON)
if(NOT PROJECT_IS_TOP_LEVEL OR NOT FERRY_CCACHE OR DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  return()
endif()
find_program(FERRY_CCACHE_PROGRAM ccache)
mark_as_advanced(FERRY_CCACHE_PROGRAM)
if(NOT FERRY_CCACHE_PROGRAM)
  return()
endif()

# Objects of one build folder or clone serve the others whose build folders are as deep. Precompiled headers need that
# sloppiness (ccache's manual, "Precompiled headers"). A Debug build takes nothing from other clones, so that a debugger
# finds the sources of its own.
set(ferry_ccache "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}"
                 CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime)
if(NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
  list(APPEND ferry_ccache CCACHE_NOHASHDIR=1)
endif()
list(APPEND ferry_ccache "${FERRY_CCACHE_PROGRAM}")
foreach(language IN ITEMS C CXX CUDA)
  set(CMAKE_${language}_COMPILER_LAUNCHER "${ferry_ccache}")
endforeach()
