# Compiles through ccache where that is installed, unless the user has chosen a launcher or said FERRY_CCACHE=OFF. Not for
# projects that have this one as a part: theirs is the choice.
option(FERRY_CCACHE "Compile through ccache where it is installed" ON)
if(NOT PROJECT_IS_TOP_LEVEL OR NOT FERRY_CCACHE OR DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  return()
endif()
find_program(FERRY_CCACHE_PROGRAM ccache)
mark_as_advanced(FERRY_CCACHE_PROGRAM)
if(NOT FERRY_CCACHE_PROGRAM)
  return()
endif()

# What is compiled in one clone serves another. Precompiled headers take that sloppiness (ccache's manual, "Precompiled
# headers"). A debugger shall find the sources of this clone, so a Debug build takes nothing from others.
set(ferry_ccache "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}"
                 CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime)
if(NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
  list(APPEND ferry_ccache CCACHE_NOHASHDIR=1)
endif()
list(APPEND ferry_ccache "${FERRY_CCACHE_PROGRAM}")
foreach(language IN ITEMS C CXX CUDA)
  set(CMAKE_${language}_COMPILER_LAUNCHER "${ferry_ccache}")
endforeach()
