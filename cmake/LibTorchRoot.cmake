# kvcache_libtorch_root - the folder of the LibTorch to build against.
#
# One answer for the find module and for scripts/bootstrap, which runs this file
# with `cmake -P` to see whether there is anything to download. A LibTorch root
# is a folder with include/ and lib/; inside a Python it is the torch package.

cmake_policy(VERSION 3.25)

# Where scripts/bootstrap keeps what it downloads.
function(kvcache_cache_dir out)
  if(NOT "$ENV{KVCACHE_CACHE_DIR}" STREQUAL "")
    set(dir "$ENV{KVCACHE_CACHE_DIR}")
  elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
    set(dir "$ENV{XDG_CACHE_HOME}/kvcache")
  else()
    set(dir "$ENV{HOME}/.cache/kvcache")
  endif()
  set(${out} "${dir}" PARENT_SCOPE)
endfunction()

# "2.15.0" of the LibTorch under `root`, or "" if there is none.
function(kvcache_libtorch_version root out)
  set(${out} "" PARENT_SCOPE)
  if(NOT EXISTS "${root}/include/ATen/core/Tensor.h"
     OR NOT EXISTS "${root}/lib/libtorch_cpu.so")
    return()
  endif()
  # The second place is that of releases before 2.12.
  foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    set(version "")
    if(EXISTS "${root}/include/${header}")
      foreach(part MAJOR MINOR PATCH)
        file(STRINGS "${root}/include/${header}" line REGEX "define TORCH_VERSION_${part} +[0-9]")
        if(line MATCHES "TORCH_VERSION_${part} +([0-9]+)")
          list(APPEND version "${CMAKE_MATCH_1}")
        endif()
      endforeach()
    endif()
    list(LENGTH version parts)
    if(parts EQUAL 3)
      list(JOIN version "." version)
      set(${out} "${version}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# Torch packages of the active Python, nearest first. find_spec does not import.
function(_kvcache_python_torch out)
  set(pythons "")
  foreach(environment VIRTUAL_ENV CONDA_PREFIX)
    if(NOT "$ENV{${environment}}" STREQUAL "")
      list(APPEND pythons "$ENV{${environment}}/bin/python3")
    endif()
  endforeach()
  list(APPEND pythons python3)
  set(found "")
  foreach(python ${pythons})
    execute_process(
      COMMAND "${python}" -c "import importlib.util as u, sys
sys.path = [p for p in sys.path if p]
s = u.find_spec('torch')
print((s.submodule_search_locations or [''])[0] if s else '')"
      OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
      RESULT_VARIABLE status)
    if(status EQUAL 0 AND path)
      list(APPEND found "${path}")
    endif()
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# Sets `out` to the first LibTorch of release `wanted` ("" for any from
# `minimum` on), or to "". Order: LibTorch_ROOT, Torch_DIR, CMAKE_PREFIX_PATH,
# the active Python, then `hints` and the user cache. The first two are a user's
# explicit word: a folder without LibTorch there is an error, not a fallback.
function(kvcache_libtorch_root minimum wanted hints out)
  set(${out} "" PARENT_SCOPE)
  foreach(name LibTorch_ROOT Torch_DIR)
    foreach(value "${${name}}" "$ENV{${name}}")
      if(value AND NOT value MATCHES "-NOTFOUND$")
        set(root "${value}")
        if(name STREQUAL "Torch_DIR")
          get_filename_component(root "${value}/../../.." ABSOLUTE)
        endif()
        kvcache_libtorch_version("${root}" version)
        if(NOT version)
          message(FATAL_ERROR "${name} is ${value}, but ${root} holds no LibTorch "
            "(include/ATen/core/Tensor.h and lib/libtorch_cpu.so); correct it or unset it.")
        endif()
        set(${out} "${root}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()

  string(REPLACE ":" ";" prefixes "$ENV{CMAKE_PREFIX_PATH}")
  list(PREPEND prefixes ${CMAKE_PREFIX_PATH})
  set(candidates "")
  foreach(prefix ${prefixes})
    file(GLOB packages "${prefix}/lib/python3*/site-packages/torch")
    # torch.utils.cmake_prefix_path answers <root>/share/cmake.
    list(APPEND candidates "${prefix}" "${prefix}/../.." "${prefix}/torch" ${packages})
  endforeach()
  _kvcache_python_torch(packages)
  list(APPEND candidates ${packages} ${hints})
  kvcache_cache_dir(cache)
  file(GLOB packages "${cache}/libtorch-*/torch")
  list(SORT packages COMPARE NATURAL ORDER DESCENDING)
  list(APPEND candidates ${packages})

  foreach(candidate ${candidates})
    kvcache_libtorch_version("${candidate}" version)
    if(NOT version)
      continue()
    endif()
    get_filename_component(root "${candidate}" ABSOLUTE)
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" release "${version}")
    if(version VERSION_LESS minimum)
      message(STATUS "LibTorch ${version} in ${root} is passed over: ${minimum} or newer is needed")
    elseif(wanted AND NOT release STREQUAL wanted)
      message(STATUS "LibTorch ${version} in ${root} is passed over: ${wanted} is needed")
    else()
      set(${out} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# The oldest release that the sources compile against.
set(KVCACHE_LIBTORCH_MINIMUM 2.11)

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  kvcache_libtorch_root(${KVCACHE_LIBTORCH_MINIMUM} "" "" root)
  execute_process(COMMAND ${CMAKE_COMMAND} -E echo "${root}")
endif()
