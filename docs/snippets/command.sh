jackfield generate "Once upon a time" --attention sdpa --cache paged
jackfield explain demo            # which backends would run it, and why not the others
jackfield check plugin:sdpa       # what a backend declares, proven
jackfield memory demo             # what fits, before anything is loaded
