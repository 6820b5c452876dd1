"""`jackfield tune`: a ladder of selections, climbed by measuring, and the profile at its end."""
