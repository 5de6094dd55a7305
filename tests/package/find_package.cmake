# Installs the build into a scratch prefix and builds a program against it.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/../../cmake/LibTorchRoot.cmake")  # kvcache_cache_dir
set(scratch "${BUILD_DIR}/package/find_package")
set(prefix "${scratch}/moved/prefix")
file(REMOVE_RECURSE "${scratch}")

run("install" ${CMAKE_COMMAND} --install "${BUILD_DIR}" --prefix "${scratch}/prefix")
# A package must work where it was unpacked, not only where it was installed.
file(MAKE_DIRECTORY "${scratch}/moved")
file(RENAME "${scratch}/prefix" "${prefix}")
file(GLOB_RECURSE files "${prefix}/*.cmake")
foreach(file ${files})
  file(READ "${file}" text)
  foreach(folder "${SOURCE_DIR}" "${BUILD_DIR}")
    string(FIND "${text}" "${folder}/" place)
    if(NOT place EQUAL -1)
      message(FATAL_ERROR "${file} names ${folder}, which a user does not have")
    endif()
  endforeach()
endforeach()

set(settings -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_CXX_COMPILER=${CXX}
  -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_BUILD_TYPE=Release)
set(configure ${CMAKE_COMMAND} -G "${GENERATOR}" -S "${CMAKE_CURRENT_LIST_DIR}/consumer"
  ${settings})
set(components core)
foreach(component model chat)
  if(EXISTS "${prefix}/lib/cmake/kvcache/kvcache-${component}.cmake")
    list(APPEND components ${component})
  endif()
endforeach()
foreach(component ${components})
  run("configure ${component}" ${configure} -B "${scratch}/${component}" -DCOMPONENT=${component})
  run("build ${component}" ${CMAKE_COMMAND} --build "${scratch}/${component}")
  run("run ${component}" "${scratch}/${component}/consumer"
    "${SOURCE_DIR}/tests/reference/data/llama/model.gguf")
  message(STATUS "${run_output}")
endforeach()

# The examples are programs that a user may copy. minimal wants real weights.
set(weights "$ENV{KVCACHE_TEST_MODEL}")
if(NOT weights)
  kvcache_cache_dir(cache)
  set(weights "${cache}/models/SmolLM2-135M-Instruct.Q4_1.gguf")
endif()
set(own_model_component core)
set(minimal_component model)
foreach(example own_model minimal)
  if(NOT ${example}_component IN_LIST components)
    continue()
  endif()
  run("configure ${example}" ${CMAKE_COMMAND} -G "${GENERATOR}"
    -S "${SOURCE_DIR}/examples/${example}" -B "${scratch}/${example}" ${settings})
  run("build ${example}" ${CMAKE_COMMAND} --build "${scratch}/${example}")
  if(example STREQUAL "own_model" OR EXISTS "${weights}")
    run("run ${example}" "${scratch}/${example}/${example}" "${weights}")
    message(STATUS "${run_output}")
  endif()
endforeach()

run_to_fail("an unknown component" "kvcache has no component nonsense"
  ${configure} -B "${scratch}/unknown" -DCOMPONENT=nonsense)
run_to_fail("another LibTorch" "LibTorch_ROOT is .* holds no LibTorch"
  ${configure} -B "${scratch}/libtorch" -DCOMPONENT=core -DLibTorch_ROOT=${scratch})
if(model IN_LIST components)
  run_to_fail("model without JSON" "model needs nlohmann_json.*nlohmann-json3-dev"
    ${configure} -B "${scratch}/json" -DCOMPONENT=model
    -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
  run("core without JSON" ${configure} -B "${scratch}/core_json" -DCOMPONENT=core
    -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
endif()
