"""The maths of alignment: pure functions of arrays, to read beside a paper."""
