# kvcache_cached_precompile(target) - what ccache asks of GCC for sources with
# precompiled headers.
function(kvcache_cached_precompile target)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()

# kvcache_precompile(target) - LibTorch's headers once for all sources of a
# target, in builds with sanitizers: nothing else compiles from scratch as often.
# Elsewhere each source is compiled as it stands, so that a header that it lacks
# is missed, and so that ccache serves one build with what another compiled.
# Sources with flags of their own set SKIP_PRECOMPILE_HEADERS.
function(kvcache_precompile target)
  if(NOT KVCACHE_SANITIZE)
    return()
  endif()
  target_precompile_headers(${target} PRIVATE
    <ATen/Parallel.h> <ATen/core/Tensor.h> <c10/util/Exception.h> <c10/util/StringUtil.h>
    <algorithm> <map> <memory> <optional> <string> <unordered_map> <vector>)
  kvcache_cached_precompile(${target})
endfunction()
