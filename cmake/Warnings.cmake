# Warnings for our own targets only; third-party headers are SYSTEM.
function(kvcache_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic
    $<$<BOOL:${KVCACHE_WERROR}>:-Werror>)
endfunction()
