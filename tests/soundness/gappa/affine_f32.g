# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.
# x = f32(f64(scale * f64(s - c))) of f32 numbers s and c, against scale (s - c).
@d = float<ieee_64, ne>;
@s = float<ieee_32, ne>;
score = s(any_s);
shift = s(any_c);
D = score - shift;
e = d(D);
q = scale * e;
p = d(q);
x = s(p);
X = scale * D;
{ |D| in [1b-149, 1b129] /\ |q| in [1b-120, 1b10] /\ |p| in [1b-121, 1b11]
-> |x -/ X| <= 75557939565253307519092b-100 }
