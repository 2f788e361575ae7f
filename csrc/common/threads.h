// How many OpenMP threads a kernel call may use.
#pragma once

namespace pyops {

// torch.get_num_threads(), or 1 in a process that was forked from one with more than one thread: an OpenMP
// pool's threads do not exist in the child, and the runtime would wait for them forever.
int kernel_threads();

}  // namespace pyops
