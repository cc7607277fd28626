"""Reports on a run: each is a pure function of a Trace, a Graph or simulated Times."""
