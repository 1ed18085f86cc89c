(* Weights of keys with codes: bounds from the sum of squares of the errors of their scores.
   Used in docs/soundness.md under "Codes of keys". *)

Require Import Certk.sums Certk.exponential.

(* Keys weigh w by their codes. The codes are off by x in a score, at most D, and the sum of all x^2 is at most X^2. *)
Section Codes.
Context {key : Type}.
Variable keys : list key.
Variables w x : key -> R.
Variables X D : R.
Hypothesis weights : forall k, In k keys -> 0 <= w k.
Hypothesis each : forall k, In k keys -> Rabs (x k) <= D.
Hypothesis some : 0 <= X.
Hypothesis together : total keys (fun k => x k * x k) <= X * X.

Definition squares := total keys (fun k => w k * w k).

(* For any factors c, such as weights. *)
Lemma cross_squares c :
  total keys (fun k => c k * Rabs (x k)) <= X * sqrt (total keys (fun k => c k * c k)).
Proof.
  eapply Rle_trans; [apply Rle_abs|]. eapply Rle_trans; [apply cauchy_schwarz|].
  rewrite Rmult_comm. apply Rmult_le_compat_r; [apply sqrt_pos|].
  rewrite <- (sqrt_square X) by easy. apply sqrt_le_1_alt.
  rewrite (total_ext _ _ (fun k => x k * x k)); [easy|].
  intros k _. rewrite <- Rabs_mult. apply Rabs_pos_eq, square_nonneg.
Qed.

Lemma cross_each c : (forall k, In k keys -> 0 <= c k) ->
  total keys (fun k => c k * Rabs (x k)) <= D * total keys c.
Proof.
  intros C. rewrite <- total_times. apply total_le. intros k I.
  rewrite (Rmult_comm D). apply Rmult_le_compat_l; auto.
Qed.

(* From bounds of the sum of weights and of that of their squares. *)
Definition root (W1 W2 : R) := Rmin (X * sqrt W2) (D * W1).

Lemma root_bound W1 W2 : 0 <= D -> total keys w <= W1 -> squares <= W2 ->
  total keys (fun k => w k * Rabs (x k)) <= root W1 W2.
Proof.
  intros D0 H1 H2. apply Rmin_glb.
  - eapply Rle_trans; [apply cross_squares|]. apply Rmult_le_compat_l; [easy | now apply sqrt_le_1_alt].
  - eapply Rle_trans; [now apply cross_each|]. now apply Rmult_le_compat_l.
Qed.

Lemma curved_largest m : (forall k, In k keys -> w k <= m) -> 0 <= m ->
  total keys (fun k => w k * (x k * x k)) <= m * (X * X).
Proof.
  intros M M0. apply Rle_trans with (m * total keys (fun k => x k * x k)).
  - rewrite <- total_times. apply total_le. intros k I.
    apply Rmult_le_compat_r; [apply square_nonneg | auto].
  - now apply Rmult_le_compat_l.
Qed.

Lemma curved_root Y : 0 <= D -> total keys (fun k => w k * Rabs (x k)) <= Y ->
  total keys (fun k => w k * (x k * x k)) <= D * Y.
Proof.
  intros D0 H. apply Rle_trans with (D * total keys (fun k => w k * Rabs (x k))).
  - rewrite <- total_times. apply total_le. intros k I.
    replace (x k * x k) with (Rabs (x k) * Rabs (x k)) by (rewrite <- Rabs_mult; apply Rabs_pos_eq, square_nonneg).
    replace (D * (w k * Rabs (x k))) with (w k * (D * Rabs (x k))) by ring.
    apply Rmult_le_compat_l; [auto|]. apply Rmult_le_compat_r; [apply Rabs_pos | auto].
  - now apply Rmult_le_compat_l.
Qed.

Lemma curved_each : 0 <= D -> total keys (fun k => w k * (x k * x k)) <= D * D * total keys w.
Proof.
  intros D0. rewrite Rmult_assoc. apply curved_root; [easy | now apply cross_each].
Qed.

(* And from one of the largest weight: the part of the exponentials beyond 1 + x. *)
Definition curved (W1 W2 m : R) :=
  growth D * Rmin (m * (X * X)) (Rmin (D * root W1 W2) (D * D * W1)).

Lemma curved_bound W1 W2 m : 0 <= D -> total keys w <= W1 -> squares <= W2 ->
  0 <= m -> (forall k, In k keys -> w k <= m) ->
  total keys (fun k => w k * (exp (x k) - 1 - x k)) <= curved W1 W2 m.
Proof.
  intros D0 H1 H2 M0 M.
  apply Rle_trans with (growth D * total keys (fun k => w k * (x k * x k))).
  - rewrite <- total_times. apply total_le. intros k I.
    specialize (weights k I). pose proof (exp_le_parabola D (x k) (each k I)). nra.
  - apply Rmult_le_compat_l; [apply growth_nonneg|]. repeat apply Rmin_glb.
    + now apply curved_largest.
    + now apply curved_root, root_bound.
    + eapply Rle_trans; [now apply curved_each|]. apply Rmult_le_compat_l; nra.
Qed.

Let real (r : key -> R) k := w k * exp (x k + r k).

(* Both sides of the certificate, for scores that are off by a rounding r of at most rho besides. *)
Theorem certificate_upper r rho m : (forall k, In k keys -> Rabs (r k) <= rho) ->
  0 <= m -> (forall k, In k keys -> w k <= m) ->
  total keys (real r) <= exp rho * (total keys w + X * sqrt squares + growth D * (m * (X * X))).
Proof.
  intros B M0 M.
  apply Rle_trans with (exp rho * total keys (fun k => w k + w k * Rabs (x k) + growth D * (w k * (x k * x k)))).
  - rewrite <- total_times. apply total_le. intros k I. unfold real.
    specialize (weights k I). pose proof (exp_le_parabola D (x k) (each k I)).
    pose proof (Rle_abs (x k)). pose proof (exp_pos (x k)).
    assert (exp (r k) <= exp rho).
    { apply exp_le_grows. destruct (abs_bounds _ _ (B k I)). lra. }
    pose proof (exp_pos (r k)). rewrite exp_plus.
    replace (w k * (exp (x k) * exp (r k))) with (exp (r k) * (w k * exp (x k))) by ring.
    apply Rmult_le_compat; [lra | nra | easy | nra].
  - apply Rmult_le_compat_l; [left; apply exp_pos|]. rewrite !total_plus, total_times.
    pose proof (cross_squares w). fold squares in *.
    pose proof (Rmult_le_compat_l _ _ _ (growth_nonneg D) (curved_largest m M M0)). lra.
Qed.

Theorem certificate_lower r rho : (forall k, In k keys -> Rabs (r k) <= rho) ->
  exp (- rho) * (total keys w - X * sqrt squares) <= total keys (real r).
Proof.
  intros B.
  apply Rle_trans with (exp (- rho) * total keys (fun k => w k - w k * Rabs (x k))).
  - apply Rmult_le_compat_l; [left; apply exp_pos|]. rewrite total_minus.
    pose proof (cross_squares w). fold squares in *. lra.
  - rewrite <- total_times. apply total_le. intros k I. unfold real.
    specialize (weights k I). pose proof (exp_ge_line (x k)).
    assert (exp (- rho) <= exp (r k)).
    { apply exp_le_grows. destruct (abs_bounds _ _ (B k I)). lra. }
    pose proof (exp_pos (- rho)). pose proof (exp_pos (x k)).
    pose proof (Rle_abs (- x k)). rewrite Rabs_Ropp in *. rewrite exp_plus.
    assert (w k - w k * Rabs (x k) <= w k * exp (x k)) by nra.
    apply Rle_trans with (exp (- rho) * (w k * exp (x k))); [apply Rmult_le_compat_l; lra|].
    replace (w k * (exp (x k) * exp (r k))) with (exp (r k) * (w k * exp (x k))) by ring.
    apply Rmult_le_compat_r; [nra | easy].
Qed.
End Codes.

(* Heavy keys by D alone, the others by the certificate: X bounds their errors, too. *)
Theorem certificate_heavy {key : Type} (heavy others : list key) (w x r : key -> R) X D rho m :
  let keys := heavy ++ others in
  (forall k, In k keys -> 0 <= w k) -> (forall k, In k keys -> Rabs (x k) <= D) ->
  (forall k, In k keys -> Rabs (r k) <= rho) -> 0 <= X -> total keys (fun k => x k * x k) <= X * X ->
  0 <= m -> (forall k, In k others -> w k <= m) ->
  total keys (fun k => w k * exp (x k + r k))
  <= exp rho * (exp D * total heavy w
       + (total others w + X * sqrt (squares others w) + growth D * (m * (X * X)))).
Proof.
  intros keys W B R X0 S M0 M. unfold keys in *. rewrite total_app, Rmult_plus_distr_l in *.
  assert (inh : forall k, In k heavy -> In k (heavy ++ others)) by (intros; apply in_or_app; auto).
  assert (ino : forall k, In k others -> In k (heavy ++ others)) by (intros; apply in_or_app; auto).
  apply Rplus_le_compat.
  - rewrite <- !total_times. apply total_le. intros k I.
    specialize (W k (inh k I)). specialize (B k (inh k I)). specialize (R k (inh k I)).
    apply abs_bounds in B. apply abs_bounds in R.
    assert (exp (x k + r k) <= exp rho * exp D) by (rewrite <- exp_plus; apply exp_le_grows; lra). nra.
  - apply (certificate_upper others w x X D); auto.
    pose proof (squares_nonneg heavy x). lra.
Qed.
