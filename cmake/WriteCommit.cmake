cmake_minimum_required(VERSION 3.25)
# cmake -DSOURCE_DIR=… -DOUTPUT=… -P WriteCommit.cmake
# Writes the commit that a program is built from. Every build runs it; the file changes only when the commit does.
execute_process(
  COMMAND git describe --always --dirty --abbrev=12 --exclude=*
  WORKING_DIRECTORY "${SOURCE_DIR}"
  OUTPUT_VARIABLE commit
  OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_QUIET)
if(NOT commit)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT "${OUTPUT}" CONTENT "#define FERRY_COMMIT \"@commit@\"\n" @ONLY)
