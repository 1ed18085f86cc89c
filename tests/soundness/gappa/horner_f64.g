# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.
# The polynomial of f64 for 2^(1 + f), in fused steps, against its real value.
@rnd = float<ieee_64, ne>;
f = rnd(any_f);
c0 = 2;
c1 = 3121657384091341b-51;
c2 = 8655072054890351b-54;
c3 = 3999492613209493b-55;
c4 = 5544469274198161b-58;
c5 = 768645584316721b-58;
c6 = 5680150285617003b-64;
c7 = 4533348059549489b-67;
c8 = 5811187754522949b-71;
c9 = 676496443260595b-71;
p8 = rnd(c9 * f + c8);
P8 = c9 * f + c8;
p7 = rnd(p8 * f + c7);
P7 = P8 * f + c7;
p6 = rnd(p7 * f + c6);
P6 = P7 * f + c6;
p5 = rnd(p6 * f + c5);
P5 = P6 * f + c5;
p4 = rnd(p5 * f + c4);
P4 = P5 * f + c4;
p3 = rnd(p4 * f + c3);
P3 = P4 * f + c3;
p2 = rnd(p3 * f + c2);
P2 = P3 * f + c2;
p1 = rnd(p2 * f + c1);
P1 = P2 * f + c1;
p0 = rnd(p1 * f + c0);
P0 = P1 * f + c0;
{ f in [0, 1] -> |p0 -/ P0| <= 154811237190860b-100 }
$ f in 64;
