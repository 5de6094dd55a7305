// src/model/forward/row_loops_avx512.cpp - the row loops, compiled for avx512.
#define KVCACHE_ROW_LOOPS avx512
#include "src/model/forward/row_loops.inc"
