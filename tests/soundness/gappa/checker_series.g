# Made by tests/support/gappa_scripts.py of the source and of docs/soundness.md.
# The series of the checker's exponential, each step rounded three times, against its real value.
@d = float<ieee_64, ne>;
r = d(any_r);
s16 = d(d(d(1 * r) / 16) + 1);
S16 = 1 * r / 16 + 1;
s15 = d(d(d(s16 * r) / 15) + 1);
S15 = S16 * r / 15 + 1;
s14 = d(d(d(s15 * r) / 14) + 1);
S14 = S15 * r / 14 + 1;
s13 = d(d(d(s14 * r) / 13) + 1);
S13 = S14 * r / 13 + 1;
s12 = d(d(d(s13 * r) / 12) + 1);
S12 = S13 * r / 12 + 1;
s11 = d(d(d(s12 * r) / 11) + 1);
S11 = S12 * r / 11 + 1;
s10 = d(d(d(s11 * r) / 10) + 1);
S10 = S11 * r / 10 + 1;
s9 = d(d(d(s10 * r) / 9) + 1);
S9 = S10 * r / 9 + 1;
s8 = d(d(d(s9 * r) / 8) + 1);
S8 = S9 * r / 8 + 1;
s7 = d(d(d(s8 * r) / 7) + 1);
S7 = S8 * r / 7 + 1;
s6 = d(d(d(s7 * r) / 6) + 1);
S6 = S7 * r / 6 + 1;
s5 = d(d(d(s6 * r) / 5) + 1);
S5 = S6 * r / 5 + 1;
s4 = d(d(d(s5 * r) / 4) + 1);
S4 = S5 * r / 4 + 1;
s3 = d(d(d(s4 * r) / 3) + 1);
S3 = S4 * r / 3 + 1;
s2 = d(d(d(s3 * r) / 2) + 1);
S2 = S3 * r / 2 + 1;
s1 = d(d(d(s2 * r) / 1) + 1);
S1 = S2 * r / 1 + 1;
{ r in [-0.347, 0.347] -> |s1 -/ S1| <= 267401227875123b-100 }
$ r in 64;
