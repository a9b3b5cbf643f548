cmake_minimum_required(VERSION 3.25)
# cmake -DSOURCE_DIR=… -DOUTPUT=… -P WriteCommit.cmake
# Run by every build, so that a program always knows the commit it was really built from; writes only on change.
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
