# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.
# The polynomial of f32 for 2^(1 + f), in fused steps, against its real value.
@rnd = float<ieee_32, ne>;
f = rnd(any_f);
c0 = 2;
c1 = 11629149b-23;
c2 = 16117163b-25;
c3 = 14978675b-27;
c4 = 9681963b-29;
c5 = 16038525b-32;
p4 = rnd(c5 * f + c4);
P4 = c5 * f + c4;
p3 = rnd(p4 * f + c3);
P3 = P4 * f + c3;
p2 = rnd(p3 * f + c2);
P2 = P3 * f + c2;
p1 = rnd(p2 * f + c1);
P1 = P2 * f + c1;
p0 = rnd(p1 * f + c0);
P0 = P1 * f + c0;
{ f in [0, 1] -> |p0 -/ P0| <= 83113650098505755761049b-100 }
$ f in 64;
