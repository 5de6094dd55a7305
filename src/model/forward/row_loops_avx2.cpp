// src/model/forward/row_loops_avx2.cpp - the row loops, compiled for avx2.
#define KVCACHE_ROW_LOOPS avx2
#include "src/model/forward/row_loops.inc"
