# Warnings for our own targets only; third-party headers are SYSTEM.
function(kvcache_warnings target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic $<$<BOOL:${KVCACHE_WERROR}>:-Werror>>
    # nvcc's own intermediate code is not pedantic.
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra
      $<$<BOOL:${KVCACHE_WERROR}>:-Werror=all-warnings>>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 sees overlaps in joined std::strings that are not there (its bug 105651).
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  endif()
endfunction()
