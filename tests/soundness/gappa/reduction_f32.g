# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.
# t = x log2 e - 1, rounded once, and its fraction t - k, of f32. LOG2E is the real one.
@rnd = float<ieee_32, ne>;
L = 12102203b-23;
x = rnd(any_x);
t = rnd(x * L - 1);
T = x * LOG2E - 1;
f = t - k;
{ x in [-5723259b-16, 0] /\ LOG2E - L in [-24427857342588100761407b-100, 24427857342588100761407b-100] /\ @FIX(k, 0) /\ f in [0, 1]
-> |t - T| <= 6981546608274483483928166b-100 /\ t in [-127, -1] /\ rnd(f) - f in [0, 0] }
