# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.
# x = f64(scale * f64(s - c)) of f64 numbers s and c, against scale (s - c).
@d = float<ieee_64, ne>;
score = d(any_s);
shift = d(any_c);
D = score - shift;
e = d(D);
q = scale * e;
p = d(q);
X = scale * D;
{ |D| in [1b-1074, 1b1023] /\ |q| in [1b-1021, 1b10] -> |p -/ X| <= 281475258185632b-100 }
