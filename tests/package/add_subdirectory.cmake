# Takes the source tree into another project and builds that.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
set(scratch "${BUILD_DIR}/package/add_subdirectory")
file(REMOVE_RECURSE "${scratch}")
run("configure" ${CMAKE_COMMAND} -G "${GENERATOR}"
  -S "${CMAKE_CURRENT_LIST_DIR}/subdirectory" -B "${scratch}"
  -DKVCACHE_SOURCE_DIR=${SOURCE_DIR} -DLibTorch_ROOT=${LIBTORCH}
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}
  -DCMAKE_BUILD_TYPE=Release)
run("build" ${CMAKE_COMMAND} --build "${scratch}")
run("run" "${scratch}/consumer")
message(STATUS "${run_output}")

# Nothing of ours may leak into the other project: no tests, no install rules.
execute_process(COMMAND ${CMAKE_CTEST_COMMAND} --test-dir "${scratch}" -N
  OUTPUT_VARIABLE tests ERROR_VARIABLE tests)
if(NOT tests MATCHES "Total Tests: 0|No tests were found")
  message(FATAL_ERROR "add_subdirectory brought tests along:\n${tests}")
endif()
