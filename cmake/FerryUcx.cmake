# Choice of the network engine over UCX: sets FERRY_WITH_UCX and, where that is on, FERRY_UCX_INCLUDE_DIR and
# ferry_ucx_library. It needs only the headers. Nothing links UCX, so the build also runs where UCX is not installed.
set(FERRY_WITH_UCX OFF)
set(ferry_ucx_library "${FERRY_UCX_LIBRARY}")
set(ferry_ucx_headers)
if(FERRY_UCX_LIBRARY STREQUAL "WHEEL")
  execute_process(
    COMMAND "${CMAKE_CURRENT_LIST_DIR}/../scripts/find_ucx.sh"
    OUTPUT_VARIABLE ferry_ucx_library
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(ferry_ucx_headers "${ferry_ucx_library}/../include")
endif()
if(FERRY_UCX STREQUAL "AUTO" OR FERRY_UCX)
  find_path(FERRY_UCX_INCLUDE_DIR ucp/api/ucp.h HINTS ${ferry_ucx_headers} DOC "Folder that has ucp/api/ucp.h")
  mark_as_advanced(FERRY_UCX_INCLUDE_DIR)
  if(FERRY_UCX_INCLUDE_DIR)
    set(FERRY_WITH_UCX ON)
  elseif(NOT FERRY_UCX STREQUAL "AUTO")
    message(FATAL_ERROR "FERRY_UCX is ${FERRY_UCX}, but ucp/api/ucp.h was not found: install UCX's headers (libucx-dev on "
                        "Debian and Ubuntu), set FERRY_UCX_INCLUDE_DIR, or build with -DFERRY_UCX=OFF")
  endif()
endif()
if(NOT FERRY_WITH_UCX)
  unset(FERRY_UCX_INCLUDE_DIR CACHE)
  set(FERRY_UCX_INCLUDE_DIR "")
endif()
