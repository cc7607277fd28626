"""Rules: each turns one kind of evidence in a trace into edges. Small, and testable and removable alone.

A rule takes a Draft (the nodes) and returns Edges. It may only say what the recorded times do not contradict: a node
never waits for something that ended after it had to be done. That alone keeps the graph free of cycles.
"""
