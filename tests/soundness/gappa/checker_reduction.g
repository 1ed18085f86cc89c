# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.
# r = x - k ln 2 in the checker's exponential; LN2 is the real one. Nearer to 0, k is 0 and r is x.
@d = float<ieee_64, ne>;
x = d(any_x);
HIGH = 2977044471b-32;
LOW = 3691024475790907b-84;
L = 3248660424278399b-51;
w = x * L;
k = int<ne>(d(w));
a = x - k * HIGH;
h = d(a);
b = h - k * LOW;
r = d(b);
R = x - k * LN2;
{ x in [-708, -1b-2] /\ LN2 - (HIGH + LOW) in [-14721b-100, 14721b-100]
-> h - a in [0, 0] /\ |r - R| <= 35536215809720b-100 /\ |R| <= 0.347 }
a -> x * (1 - L * HIGH) + HIGH * (w - d(w)) + HIGH * (d(w) - k);
R -> a - k * LOW - k * (LN2 - (HIGH + LOW));
r - R -> (r - b) + (h - a) + k * (LN2 - (HIGH + LOW));
