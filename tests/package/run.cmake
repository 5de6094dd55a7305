cmake_minimum_required(VERSION 3.25)  # the policies

# run(what command...): runs it, and stops with its output if it fails.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${what} failed (${status}):\n${output}")
  endif()
  message(STATUS "${what}: done")
  set(run_output "${output}" PARENT_SCOPE)
endfunction()

# run_to_fail(what expression command...): it must fail and say so.
function(run_to_fail what expression)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " line "${output}")
  if(status EQUAL 0 OR NOT line MATCHES "${expression}")
    message(FATAL_ERROR "${what} must fail with \"${expression}\" but got (${status}):\n${output}")
  endif()
  message(STATUS "${what}: refused as it should be")
endfunction()
