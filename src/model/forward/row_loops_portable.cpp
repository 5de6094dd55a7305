// src/model/forward/row_loops_portable.cpp - the row loops, compiled for any
// CPU.
#define KVCACHE_ROW_LOOPS portable
#include "src/model/forward/row_loops.inc"
