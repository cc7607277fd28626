"""What a run tells: each report is a pure function of a Trace, a Graph or simulated Times."""
