"""Takes out of a process, and of its forks, what torch does at the end of every one: half of an empty test's time.

``torch._dynamo`` imports a package to print times that nobody asked for, and the libraries of operators are taken down.
"""

import atexit
import weakref

from torch._dynamo import utils

atexit.unregister(utils.dump_compile_times)
for finalizer in tuple(weakref.finalize._registry):
    finalizer.atexit = False
