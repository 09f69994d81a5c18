"""Convolves one block, forward and backward.

[Note: passes] A convolution has three passes, and a transposed one the same three, in another
order::

                            convolution    transposed convolution
    forward                 "forward"      "input"
    gradient of its input   "input"        "forward"
    gradient of its weight  "weight"       "weight", the two volumes changing places

Each pass has several *variants* (`variants`); a rule from shapes and types says which one runs,
or a measurement does (`autotune`). `problem` describes a pass, `passes` runs it.
"""
