"""Imported once, in the process that the ranks of these tests are forked from."""

import cpu_stack

cpu_stack.import_bridge()
