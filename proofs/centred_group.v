(* The most that errors of codes move between a set of keys and the rest, over all sets. *)

Require Import Certk.sums Certk.exponential Certk.gram_certificate.

(* The square of kappa, and eta. *)
Definition kappa_squared (t : R) : R :=
  if Rle_dec t (1 - / sqrt 2) then (1 - t) * (1 - t) else / (4 * (t * (2 - t))).
Definition eta (s : R) : R := if Rle_dec s (1 / 3) then s * (1 - s) else (1 + s) * (1 + s) / 8.

Lemma kappa_bound t p : 0 <= t <= 1 -> 0 <= p <= 1 / 2 -> forall a, a <= 1 -> t * a <= p ->
  (1 - 2 * p) * a + p * p <= kappa_squared t.
Proof.
  intros T P a A1 A2. unfold kappa_squared.
  assert (S : / sqrt 2 * / sqrt 2 = 1 / 2).
  { rewrite <- Rinv_mult. rewrite sqrt_sqrt by lra. lra. }
  assert (S0 : 0 < / sqrt 2) by (apply Rinv_0_lt_compat, sqrt_lt_R0; lra).
  destruct Rle_dec as [L|L].
  - (* 2 t (2 - t) <= 1 *)
    assert (B : 2 * (t * (2 - t)) <= 1) by nra.
    destruct (Rle_lt_dec t p) as [Q|Q]; [nra|].
    assert (0 < t) by lra.
    apply Rmult_le_reg_l with t; [easy|].
    assert ((1 - 2 * p) * (t * a) <= (1 - 2 * p) * p) by (apply Rmult_le_compat_l; lra).
    (* t (1 - t)^2 - (1 - 2 p) p - t p^2 = (t - p) (1 - 2 t + t^2 - 2 p + t p) and this is at least 0 *)
    assert (0 <= (t - p) * (1 - 2 * t + t * t - 2 * p + t * p)); [|nra].
    apply Rmult_le_pos; nra.
  - assert (0 < t) by (assert (/ sqrt 2 <= 1) by nra; lra).
    assert (B : 0 < 4 * (t * (2 - t))) by nra.
    apply Rmult_le_reg_r with (4 * (t * (2 - t))); [easy|]. rewrite Rinv_l by lra.
    assert ((1 - 2 * p) * (t * a) <= (1 - 2 * p) * p) by (apply Rmult_le_compat_l; lra).
    pose proof (square_nonneg (2 * p * (2 - t) - 1)).
    assert (((1 - 2 * p) * (t * a) + t * (p * p)) * (4 * (2 - t)) <= ((1 - 2 * p) * p + t * (p * p)) * (4 * (2 - t))) by nra.
    nra.
Qed.

Lemma eta_bound s p : 0 <= s -> 0 <= p <= 1 / 2 -> forall b, b <= s -> b <= p ->
  (1 - 2 * p) * b + p * s <= eta s.
Proof.
  intros S P b B1 B2. unfold eta. destruct Rle_dec as [L|L].
  - destruct (Rle_lt_dec s p); nra.
  - pose proof (square_nonneg (4 * p - (1 + s))). nra.
Qed.

Section Group.
Context {key : Type}.
Variable keys : list key.
Variables u x : key -> R.
(* Bounds: of errors, together and each; of the sum of weights, of squares, of the largest weight; of the whole row's sum. *)
Variables X D W1 W2 m U : R.
Hypothesis used : forall k, In k keys -> 0 <= u k.
Hypothesis each : forall k, In k keys -> Rabs (x k) <= D.
Hypothesis some : 0 <= X.
Hypothesis together : total keys (fun k => x k * x k) <= X * X.
Hypothesis sum : total keys u <= W1.
Hypothesis sum_of_squares : squares keys u <= W2.
Hypothesis largest : forall k, In k keys -> u k <= m.
Hypothesis positive : 0 < m /\ 0 < U /\ 0 <= D.

Definition centred : R :=
  Rmin (X * sqrt (kappa_squared (Rmin 1 (W2 / (m * U))) * W2)) (D * (eta (W1 / U) * U)).

(* Keys of S count with 1 - p and the others with p, where keys of S have at most the share p. *)
Lemma centred_bound S p : 0 <= p <= 1 / 2 -> total keys (part S u) <= p * U ->
  total keys (fun k => (if S k then 1 - p else p) * u k * Rabs (x k)) <= centred.
Proof.
  intros P B. destruct positive as [m0 [U0 D0]].
  set (c := fun k => (if S k then 1 - p else p) * u k).
  assert (C : forall k, In k keys -> 0 <= c k).
  { intros k I. unfold c. specialize (used k I). destruct (S k); nra. }
  apply Rmin_glb.
  - eapply Rle_trans; [apply (cross_squares keys x X some together c)|].
    apply Rmult_le_compat_l; [easy|]. apply sqrt_le_1_alt.
    set (A := total keys (part S (fun k => u k * u k))).
    assert (E : total keys (fun k => c k * c k) = (1 - 2 * p) * A + p * p * squares keys u).
    { unfold A, squares. rewrite <- !total_times, <- total_plus. apply total_ext. intros k _.
      unfold c, part. destruct (S k); ring. }
    rewrite E.
    assert (A0 : 0 <= A) by (apply part_nonneg; intros; apply square_nonneg).
    assert (AW : A <= W2).
    { eapply Rle_trans; [apply part_le|exact sum_of_squares]. intros. apply square_nonneg. }
    assert (AU : A <= p * (m * U)).
    { apply Rle_trans with (m * total keys (part S u)); [|nra].
      unfold A. rewrite <- total_times. apply total_le. intros k I.
      specialize (used k I). specialize (largest k I). unfold part. destruct (S k); nra. }
    assert (0 <= squares keys u) by (apply total_nonneg; intros; apply square_nonneg).
    destruct (Req_dec W2 0) as [Z|Z].
    { rewrite Z in *. rewrite Rmult_0_r. nra. }
    assert (W0 : 0 < W2) by lra. assert (mU : 0 < m * U) by nra.
    set (t := Rmin 1 (W2 / (m * U))).
    assert (T : 0 <= t <= 1).
    { split; [apply Rmin_glb; [lra | apply Rmult_le_pos; [lra | left; now apply Rinv_0_lt_compat]] | apply Rmin_l]. }
    assert (tA : t * (A / W2) <= p).
    { apply Rmult_le_reg_r with (W2 * (m * U)); [nra|].
      replace (t * (A / W2) * (W2 * (m * U))) with (t * (m * U) * A) by (field; lra).
      assert (t * (m * U) <= W2).
      { apply Rle_trans with (W2 / (m * U) * (m * U)); [apply Rmult_le_compat_r; [lra | apply Rmin_r] | right; field; lra]. }
      apply Rle_trans with (W2 * A); [apply Rmult_le_compat_r; lra | nra]. }
    assert (a1 : A / W2 <= 1) by (apply Rmult_le_reg_r with W2; [easy|]; replace (A / W2 * W2) with A by (field; lra); lra).
    pose proof (kappa_bound t p T P (A / W2) a1 tA) as K.
    apply Rle_trans with (((1 - 2 * p) * (A / W2) + p * p) * W2); [|now apply Rmult_le_compat_r; [lra|]].
    replace (((1 - 2 * p) * (A / W2) + p * p) * W2) with ((1 - 2 * p) * A + p * p * W2) by (field; lra).
    nra.
  - eapply Rle_trans; [apply (cross_each keys x D each c C)|].
    apply Rmult_le_compat_l; [easy|].
    set (b := total keys (part S u)).
    assert (E : total keys c = (1 - 2 * p) * b + p * total keys u).
    { unfold b. rewrite <- !total_times, <- total_plus. apply total_ext. intros k _.
      unfold c, part. destruct (S k); ring. }
    rewrite E.
    assert (b0 : 0 <= b) by now apply part_nonneg.
    assert (bW : b <= W1) by (eapply Rle_trans; [now apply part_le | exact sum]).
    assert (0 <= total keys u) by now apply total_nonneg.
    assert (s0 : 0 <= W1 / U) by (apply Rmult_le_pos; [lra | left; now apply Rinv_0_lt_compat]).
    assert (b1 : b / U <= W1 / U) by (apply Rmult_le_compat_r; [left; now apply Rinv_0_lt_compat | easy]).
    assert (b2 : b / U <= p) by (apply Rmult_le_reg_r with U; [easy|]; replace (b / U * U) with b by (field; lra); easy).
    pose proof (eta_bound (W1 / U) p s0 P (b / U) b1 b2) as K.
    apply Rle_trans with (((1 - 2 * p) * (b / U) + p * (W1 / U)) * U); [|now apply Rmult_le_compat_r; [lra|]].
    replace (((1 - 2 * p) * (b / U) + p * (W1 / U)) * U) with ((1 - 2 * p) * b + p * W1) by (field; lra).
    nra.
Qed.
End Group.
