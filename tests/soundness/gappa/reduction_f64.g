# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.
# t = x log2 e - 1, rounded once, and its fraction t - k, of f64. LOG2E is the real one.
@rnd = float<ieee_64, ne>;
L = 3248660424278399b-51;
x = rnd(any_x);
t = rnd(x * L - 1);
T = x * LOG2E - 1;
f = t - k;
{ x in [-708, 0] /\ LOG2E - L in [-25811255364368b-100, 25811255364368b-100] /\ @FIX(k, 0) /\ f in [0, 1]
-> |t - T| <= 90353467524120576b-100 /\ t in [-1023, -1] /\ rnd(f) - f in [0, 0] }
