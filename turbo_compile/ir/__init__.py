"""The program as data: graphs and segments, mesh and placements, the printer, the verifier and the runner of passes."""
