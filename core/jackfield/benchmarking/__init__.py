"""How fast selections are, beside one another: measured in turn, judged by tokens and observation.

`jackfield.benchmarking.running.bench` is what `jackfield bench` calls.
"""
